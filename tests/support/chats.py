"""Example conversations."""

from akunu_py.chats.options import ChatOptions
from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.types import FinishReason, Stats

STATS = Stats(30, 4, 121, 52, 160, 67, prefill_s=0.25, decode_s=1.5)
T0 = 1_795_240_000.0  # Saturday, 21 November 2026, 05:46:40 UTC


def add_prompt(
    tree: ConversationTree, text: str, parent: str | None = None, at: float = T0
) -> ChatMessage:
    """Add a prompt after `parent` and return it."""
    message = ChatMessage("user", text, parent, created=at, id=f"{tree.conversation}-{len(tree)}")
    tree.add(message)
    return message


def add_answer(
    tree: ConversationTree, text: str, parent: str, *, thinking: str = "",
    finish: FinishReason | None = "stop", stats: Stats | None = None, at: float = T0,
) -> ChatMessage:  # fmt: skip
    """Add an answer to the prompt `parent` and return it."""
    name = f"{tree.conversation}-{len(tree)}"
    message = ChatMessage(
        "assistant", text, parent, thinking, "starter", stats, finish, created=at, id=name
    )
    tree.add(message)
    return message


def branched(conversation: str = "queue") -> ConversationTree:
    """Return six messages with two branch points: two answers (the older is active), and an edited
    prompt (the newer is active)."""
    tree = ConversationTree(conversation, "What is a queue?")
    question = add_prompt(tree, "What is a queue?\nShow me Python.")
    first = add_answer(
        tree, "First in, first *out*.", question.id, thinking="Easy.", finish="length", stats=STATS
    )
    add_answer(tree, "A line of people.", question.id, at=T0 + 60)
    add_prompt(tree, "Thanks.", first.id, at=T0 + 120)
    edited = add_prompt(tree, "Thank you!", first.id, at=T0 + 180)
    add_answer(tree, "You are welcome.", edited.id, at=T0 + 240)
    tree.activate_branch(edited.id)
    tree.options = ChatOptions(0.25, 300, 0.5, 7, "low", 64)
    return tree


def state(tree: ConversationTree) -> tuple[object, ...]:
    """Return everything that is kept of a conversation."""
    return tree.conversation, tree.title, tree.messages, tree.active_branch(), tree.options


def exchange_of(conversation: str, prompt: str, answer: str, at: float) -> ConversationTree:
    """A prompt and its answer."""
    tree = ConversationTree(conversation, prompt.partition("\n")[0])
    add_answer(tree, answer, add_prompt(tree, prompt, at=at).id, at=at + 5)
    return tree
