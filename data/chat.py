"""
K3's messages as token ids, and back (report, Appendix F).

    {"role": "system" | "user", "content": text}
    {"role": "assistant", "reasoning_content": text, "content": text}

A message is a line of tags, and tags are ordinary text between control tokens. With [ | ] . for
<|open|>, <|sep|>, <|close|>, <|end_of_msg|>, two of them:

    [message role="user"|What is 2+3?]message|.
    [message role="assistant"|[think|2, then three more]think|[response|5]response|]message|.

Whatever else a message has becomes an attribute, such as type="thinking-effort". Attributes are
escaped; text is not, since control tokens are added by id and no text encodes to one: "<|open|>" in
a text is eight characters.
"""
import json
import re

import numpy as np

from data import tokenizer

OPEN, CLOSE, SEP, END = CONTROL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
EFFORTS = ("low", "high", "max")
# The released template's words, which name a `medium` that it does not have
EFFORT = ("`thinking_effort` guides on how much to think in your thinking channel (not including "
          "the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
          "Now the system is invoked with `thinking_effort={}`.")


def effort_message(effort):
    """The message that says how much to think; it comes before all others."""
    return {"role": "system", "type": "thinking-effort", "content": EFFORT.format(effort)}


def control_ids(enc):
    """The ids of CONTROL. Errors: ValueError, if the tokenizer has no such tokens."""
    ids = [enc._special_tokens.get(name) for name in CONTROL]
    if None in ids:
        raise ValueError(f"tokenizer {enc.name} has no tokens for messages; prepare the text with "
                         "prepare.py --chat and train on that first")
    return ids


def render(messages, enc, answer=False):
    """
    Messages → ids, and for each of them whether the assistant says it: its whole message after the
    opening tag, <|end_of_msg|> included. answer: begin the assistant's next message, up to where it
    thinks.
    """
    opening, close, sep, end = control_ids(enc)
    ids, said = [], []

    def add(says, *parts):
        """parts: a control token's id, or a text."""
        for part in parts:
            ids.extend(tokenizer.encode(enc, part).tolist() if isinstance(part, str) else [part])
            said.extend([says] * (len(ids) - len(said)))

    for message in messages:
        attributes = {"role": message["role"], **message}
        thought, text = (attributes.pop(key, "") for key in ("reasoning_content", "content"))
        tag = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())
        says = message["role"] == "assistant"
        add(False, opening, "message" + tag, sep)
        if says:
            add(True, opening, "think", sep, thought, close, "think", sep)
            add(True, opening, "response", sep, text, close, "response", sep)
        else:
            add(False, text)
        add(says, close, "message", sep, end)
    if answer:
        add(False, opening, 'message role="assistant"', sep, opening, "think", sep)
    return ids, said


def escape(value):
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value):
    return value.replace("&quot;", '"').replace("&amp;", "&")


# ---- the way back

def events(tokens, enc):
    """
    Ids, one at a time → (OPEN or CLOSE, tag), ("text", piece), (END, ""): what a terminal shows as
    it comes. A character may be spread over several ids; it comes with the last of them.
    """
    names, text = dict(zip(control_ids(enc), CONTROL)), tokenizer.StreamDecoder(enc)
    kind, tag = "text", ""                             # kind: of what the ids belong to
    for token in tokens:
        name = names.get(token)
        piece = text.finish() if name else text.push(token)
        if kind != "text":
            tag += piece
        elif piece:
            yield "text", piece
        if name in (OPEN, CLOSE):
            kind, tag = name, ""
        elif name == SEP:
            yield kind, tag
            kind = "text"
        elif name == END:
            yield END, ""
    if text.finish():
        yield "text", "\ufffd"


def parse(ids, enc):
    """render's way back, ids → messages. Errors: ValueError, if they are no whole messages."""
    found, messages, channel = joined(events(ids, enc)), [], "content"
    for kind, text in found:
        if kind == OPEN and text.startswith("message"):
            attributes = re.findall(r' ([\w-]+)="([^"]*)"', text)
            messages.append({name: unescape(value) for name, value in attributes} | {"content": ""})
        elif kind == OPEN:
            channel = "reasoning_content" if text == "think" else "content"
        elif kind == "text" and messages:
            messages[-1][channel] = text
    # One text has many spellings in tokens, so it is not the ids that must be the same
    whole = all("role" in message for message in messages)
    if not whole or joined(events(render(messages, enc)[0], enc)) != found:
        raise ValueError("expected whole messages of K3's template, got "
                         f"{enc.decode(list(ids))[:80]!r}")
    return messages


def joined(events):
    """The same with every text in one piece, a list."""
    found = []
    for kind, text in events:
        if kind == "text" and found and found[-1][0] == "text":
            text = found.pop()[1] + text
        found.append((kind, text))
    return found


def read_answer(ids, enc):
    """What a model says after render(…, answer=True) → its message; None, if it is not whole."""
    opening = render([], enc, answer=True)[0]
    try:
        (message,) = parse(opening + list(ids), enc)
    except ValueError:
        return None
    return message


# ---- conversations from a file

def read_conversations(path):
    """
    A .jsonl file with {"messages": […]} in every line → a list of lists of messages. Errors:
    ValueError that names the line.
    """
    conversations = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    conversations.append(checked(json.loads(line)))
                except (ValueError, RecursionError) as error:
                    reason = "no JSON" if isinstance(error, json.JSONDecodeError) else error
                    raise ValueError(f"{path}, line {number}: {reason}; expected "
                                     '{"messages": [{"role": "user", "content": "…"}, {"role": '
                                     '"assistant", "content": "…"}]}') from None
    return conversations


def checked(line):
    """A line of such a file → its messages. Errors: ValueError."""
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("no list of messages")
    for message in messages:
        odd = [key for key, value in message.items() if not isinstance(value, str)]
        if odd or "content" not in message:
            raise ValueError(f"a message whose {odd[0] if odd else 'content'} is no text")
        if not all(re.fullmatch(r"[\w-]+", key) for key in message):
            raise ValueError("a message with an odd attribute")
    roles = [message.get("role", "none") for message in messages]
    if "assistant" not in roles:
        raise ValueError("messages without an assistant, so there is nothing to learn")
    turns = [role for role in roles if role != "system"]
    in_turn = turns == ["user", "assistant"] * (len(turns) // 2)
    if not in_turn or "system" in roles[roles.index("user"):]:
        raise ValueError(f"roles out of order: {', '.join(roles)}; expected system messages, then "
                         "user and assistant in turn")
    return messages


# ---- rows of conversations to train on

def pack(rendered, room, key=None):
    """
    What render gives for conversations → a list of rows, each as many of them as fit into `room`
    ids. key: of their order, an int or a tuple; None keeps it. In a row the later ones see those
    before them, as documents do in pre-training.
    """
    order = range(len(rendered)) if key is None else np.random.default_rng(key).permutation(
        len(rendered))
    rows, left = [], 0
    for i in order:
        size = len(rendered[i][0])
        if size > left:
            rows.append([])
            left = room
        rows[-1].append(rendered[i])
        left -= size
    return rows


def inputs_and_targets(rows, context):
    """→ x, y (B, context) int64: y is what follows x where the assistant says it, else −1."""
    ids = np.zeros((len(rows), context + 1), np.int64)
    said = np.zeros((len(rows), context + 1), bool)
    for row, conversations in enumerate(rows):
        for to, parts in zip((ids, said), zip(*conversations)):
            flat = np.concatenate(parts)
            to[row, :len(flat)] = flat
    return ids[:, :-1].copy(), np.where(said, ids, -1)[:, 1:].copy()
