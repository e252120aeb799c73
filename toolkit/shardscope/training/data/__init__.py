"""Text as token windows, the shipped corpus, and tokenizers."""
