"""The gRPC services of the frontend, one a module."""
