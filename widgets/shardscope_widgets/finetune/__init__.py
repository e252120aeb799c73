"""Views of fine-tuning: from one click to a run, and a chat with the base and the tuned model side by side.

``FinetuneView``, ``ChatView`` and, for the Studio, ``FinetunePage`` are the only names that others use.
"""

from shardscope_widgets.finetune.chat_view import ChatView
from shardscope_widgets.finetune.finetune_view import FinetuneView
from shardscope_widgets.finetune.page import FinetunePage

__all__ = ["ChatView", "FinetunePage", "FinetuneView"]
