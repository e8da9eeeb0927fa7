"""How a context and a question become tokens: the model's own chat template if it has one, plain text otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from pycriticalkv.llama import Llama

MARK = "\x02the question follows\x02"  # where the text is cut; no text has it


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, cut where the question begins."""

    context: list[int]
    question: list[int]

    @property
    def tokens(self) -> list[int]:
        """The whole prompt."""
        return self.context + self.question


def _piece(llm: Llama, token: int) -> str:
    return llm.detokenize([token], special=True).decode("utf-8", errors="replace") if token >= 0 else ""


def template(llm: Llama) -> tuple[str, str, str]:
    """Text before the context, between context and question, and after the question."""
    source = (llm.metadata or {}).get("tokenizer.chat_template")
    if not source:
        return "", "\n\n", ""
    formatter = Jinja2ChatFormatter(
        template=source, eos_token=_piece(llm, llm.token_eos()), bos_token=_piece(llm, llm.token_bos())
    )
    content = f"{MARK}\n\n{MARK}"
    text = formatter(messages=[{"role": "user", "content": content}]).prompt
    before, between, after = text.split(MARK)
    return before, between, after


def build(llm: Llama, context: str, question: str) -> Prompt:
    """The prompt for a context and a question asked after it.

    Context and question are tokenized apart, so that both settings of an evaluation see the same tokens.
    """
    before, between, after = template(llm)
    bos = _piece(llm, llm.token_bos())
    brings_bos = bool(bos) and before.startswith(bos)
    first = llm.tokenize((before + context).encode(), add_bos=not brings_bos, special=True)
    return Prompt(first, llm.tokenize((between + question + after).encode(), add_bos=False, special=True))
