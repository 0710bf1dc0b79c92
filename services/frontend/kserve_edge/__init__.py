"""The face that clients of the open inference protocol know (KServe version 2, Triton): gRPC, and /v2 over HTTP.

Tensors are those of Triton's vLLM backend.
"""
