"""Media items on the device: fetched pixels, the rows that an encoder computes from them, and their steps."""
