"""InternLM 2: <|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1}}<|action_end|>"""

from services.frontend.output_processor.parsing.formats import json_blocks

FORMAT = json_blocks("<|action_start|><|plugin|>", "<|action_end|>")
