"""Text to tokens and back: tokenizers, chat templates, streaming and stop texts."""

from moestro.text.chat_template import ChatTemplate
from moestro.text.stream import StopMatcher, StreamDecoder
from moestro.text.tokenizer import Tokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "ChatTemplate",
    "StopMatcher",
    "StreamDecoder",
    "Tokenizer",
    "load_tokenizer",
    "save_tokenizer",
]
