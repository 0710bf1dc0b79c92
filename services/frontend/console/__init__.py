"""The page at / for people: a playground, the cluster as it is now, where a request's time went. Works offline."""
