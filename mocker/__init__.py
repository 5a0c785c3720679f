"""Simulated LLM serving engines."""
