"""Checks of `quire doctor`: what would keep a cluster from serving on this machine. Changes nothing."""
