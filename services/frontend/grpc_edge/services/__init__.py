"""The frontend's gRPC services, one per module."""
