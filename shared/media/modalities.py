"""Names of the modalities of media items, as protocols, settings and chat templates have them."""

IMAGE, VIDEO, AUDIO = MODALITIES = ("image", "video", "audio")
TEXT = "text"  # items of an encoder of prompts; never sent as media
