"""Sleep mode: a worker releases device memory and acquires it again at the same addresses."""
