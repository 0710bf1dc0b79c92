"""The face that routers of vLLM's gRPC server know: vllm.grpc.engine.VllmEngine."""
