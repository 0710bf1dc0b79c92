"""Programs for developers of Quire. The wheel does not contain them."""
