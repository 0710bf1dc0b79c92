"""gRPC API of vLLM's server for routers: vllm.grpc.engine.VllmEngine."""
