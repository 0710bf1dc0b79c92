"""The gRPC API: InferenceService and AdminService (protos/quire/inference/v1, protos/quire/admin/v1)."""
