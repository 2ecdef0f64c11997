"""Reference models: small, complete, and each with its tensor-parallel plan."""

from lightning_hetero.models.audio import AudioConfig, AudioEncoder
from lightning_hetero.models.decoder import Decoder, DecoderConfig
from lightning_hetero.models.vit import VisionConfig, VisionEncoder
from lightning_hetero.models.vlm import VisionLanguageModule

__all__ = [
    "AudioConfig",
    "AudioEncoder",
    "Decoder",
    "DecoderConfig",
    "VisionConfig",
    "VisionEncoder",
    "VisionLanguageModule",
]
