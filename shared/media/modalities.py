"""Names of the modalities of media items, as protocols, settings and chat templates have them."""

IMAGE, VIDEO, AUDIO = MODALITIES = ("image", "video", "audio")
