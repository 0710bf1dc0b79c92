"""Programs for developers of Quire, run from a checkout; no wheel contains them."""
