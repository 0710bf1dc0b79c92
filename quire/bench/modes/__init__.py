"""The modes of `quire bench`, a module each."""
