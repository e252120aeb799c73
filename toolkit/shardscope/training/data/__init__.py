"""Text as token windows for each rank and step, the shipped corpus, and tokenizers."""
