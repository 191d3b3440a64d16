"""Prompts of many kinds, for comparing whole answers, and one with much to copy."""

VARIED_PROMPTS = (
    "Why is the sky blue?", "Write a haiku about autumn leaves.",
    "List the first ten prime numbers.", "Explain recursion to a ten-year-old.",
    "Write a Python function that reverses a string.",
    "Translate 'good morning, my friend' into French.", "Count from one to thirty.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Turn this into JSON: name Ada, age 36, city London; name Alan, age 41, city Wilmslow.",
    "What is the capital of Australia, and why is it not Sydney?",
    "Tell me a story about a lighthouse keeper and a whale.",
    "Fix this code:\n```python\nfor i in range(10)\n    print(i)\n```",
    "Write a shell script that counts the lines of all .txt files in a folder.",
    "Summarise: The meeting moved from Monday to Wednesday because the room was booked twice.",
    "Write an email that declines an invitation politely.",
    "What are the differences between a list and a tuple in Python?",
    "Give me a recipe for pancakes with exact amounts.", "Schreibe zwei Sätze über den Herbst.",
    "用中文写一句关于海的话。",
)  # fmt: skip

REWRITE = (
    "Rewrite this Python file with the class renamed from Inventory to Stock. "
    "Change nothing else. Answer with the whole file."
    r"""

```python
class Inventory:
    def __init__(self, name):
        self.name = name
        self.items = {}

    def add(self, item, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[item] = self.items.get(item, 0) + count

    def remove(self, item, count):
        if item not in self.items:
            raise KeyError(item)
        if self.items[item] < count:
            raise ValueError("not enough items")
        self.items[item] -= count
        if self.items[item] == 0:
            del self.items[item]

    def total(self):
        return sum(self.items.values())

    def report(self):
        lines = [f"Inventory of {self.name}"]
        for item, count in sorted(self.items.items()):
            lines.append(f"{item}: {count}")
        return "\n".join(lines)
```"""
)
