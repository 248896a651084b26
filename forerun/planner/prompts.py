"""Prompts to calibrate and to measure on where no text is given: answers to them have the acceptance of everyday
assistant text."""

from __future__ import annotations

PROMPTS = (
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell in all?",
    "Write a short poem about the sea.",
    "What is the capital of France, and what is it known for?",
    "A train runs 60 km in 45 minutes. How fast is it in km/h? Explain step by step.",
    "List five uses of a paper clip.",
    "Explain photosynthesis to a child.",
    "If x + 3 = 11, what is 2x - 5?",
    "Describe how to make a cup of tea.",
)
