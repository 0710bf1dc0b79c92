"""The bundled model and its adapters."""

from pathlib import Path

NAME = "quire-tiny"
FOLDER = Path(__file__).resolve().parent / "tiny" / "model"
ADAPTERS = FOLDER.parent / "adapters"
