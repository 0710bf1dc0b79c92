"""Operators' calls on schedulers and adapters, used by gRPC and HTTP."""
