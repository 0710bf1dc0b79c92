"""Transfer of weights from a program to the workers of a cluster: as a stream, or through shared memory."""
