"""The open inference protocol (KServe version 2, Triton): gRPC, and /v2 over HTTP.

Tensors are those of Triton's vLLM backend.
"""
