"""Between the worker's plain values and worker.proto: where plans and results cross a wire."""
