"""The paths of the HTTP face, by what is asked for."""
