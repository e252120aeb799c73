"""Bytes that a rank really holds, by walking its tensors and asking its device."""
