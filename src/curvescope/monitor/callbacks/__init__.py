"""The monitor in other people's training loops: Hugging Face's `Trainer`, Lightning's `Trainer`."""

from curvescope.monitor.callbacks.hugging_face import trainer_callback
from curvescope.monitor.callbacks.pytorch_lightning import lightning_callback

__all__ = ["lightning_callback", "trainer_callback"]
