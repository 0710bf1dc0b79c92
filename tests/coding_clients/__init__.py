"""Conversations of coding assistants with their servers, as data, and a client that replays them."""
