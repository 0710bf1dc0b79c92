"""InferenceService for browsers on the HTTP port: Connect and gRPC-Web, unary calls and streams of answers."""
