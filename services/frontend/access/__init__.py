"""Who may ask, and for how much: API keys, what they are good for, and what their owners have used."""
