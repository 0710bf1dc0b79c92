"""Generated from protos/ by `make protos`; only this file is kept in git."""
