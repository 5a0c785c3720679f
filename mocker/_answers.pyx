# cython: language_level=3
"""Answers that a trace gives: can anybody but their request find the blocks that they fill?

A block can be found by whoever has the same tokens up to its end. What a request generates first ends a block that
began in its prompt, or one of its answer alone; if nobody else can have that block, nobody can have any behind it.
Prompts are runs of ids, so few blocks qualify: those that are runs themselves, and those that two answers begin alike.
O(tokens of a block) a request.
"""
import numpy as np

from mocker._common cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    SUSPECTS = 64                  # requests whose block is a run of one token: more of them are not looked into


cdef uint64_t MIX = 0x9E3779B97F4A7C15


def answers_apart(const int64_t[::1] prompt, const int64_t[::1] hash_offsets, const uint64_t[::1] hash_ids,
                  int64_t trace_block_size, const int64_t[::1] answer_offsets, const uint32_t[::1] answers,
                  int64_t block_size):
    """Whether no request of a trace can find a block that another generates.

    Parameters
    ----------
    prompt : array of int64, shape (n,)
        Prompt tokens, each id of `hash_ids` repeated.
    hash_offsets, answer_offsets : array of int64, shape (n + 1,)
        Where the ids and the given answer of each request begin; no answer: tokens that nobody else has.
    trace_block_size, block_size : int
        Tokens an id, tokens an engine block.

    Returns
    -------
    bool
        False also where it would take long to know.
    """
    cdef int64_t n = prompt.shape[0], row, i, own, need, changes, found = 0
    cdef int64_t allowed = 0 if trace_block_size % block_size == 0 else (block_size - 1) // trace_block_size + 1
    cdef uint64_t mixed
    cdef uint32_t token, before
    rows, keys, runs = np.empty(n, np.int64), np.empty(n, np.uint64), np.empty(n, np.uint8)
    cdef int64_t[::1] at = rows
    cdef uint64_t[::1] key = keys
    cdef uint8_t[::1] run = runs
    with nogil:
        for row in range(n):
            own = prompt[row] % block_size
            need = block_size - own
            if answer_offsets[row + 1] - answer_offsets[row] < need:
                continue
            mixed, changes, before = <uint64_t>(prompt[row] // block_size + 1) * MIX, 0, 0
            for i in range(block_size):
                if i < own:
                    token = <uint32_t>hash_ids[hash_offsets[row] + (prompt[row] - own + i) // trace_block_size]
                else:
                    token = answers[answer_offsets[row] + i - own]
                changes += i > 0 and token != before
                before = token
                mixed = (mixed ^ token) * MIX
                mixed ^= mixed >> 29
            at[found], key[found], run[found] = row, mixed, changes <= allowed
            found += 1
    rows, keys, runs = rows[:found], keys[:found], np.flatnonzero(runs[:found])
    if len(runs) and (allowed or len(runs) > SUSPECTS):
        return False
    ids, begins, lengths = np.asarray(hash_ids).astype(np.uint32), np.asarray(hash_offsets), np.asarray(prompt)
    for row in rows[runs]:                     # does a prompt go on with that token?
        own = prompt[row] // block_size * block_size
        i = own // trace_block_size
        mine = ids[begins[row]:begins[row] + (own + trace_block_size - 1) // trace_block_size]
        others = np.flatnonzero((lengths >= own + block_size) & (np.diff(begins) > i))
        others = others[ids[begins[others] + i] == answers[answer_offsets[row]]]
        if any(np.array_equal(ids[begins[other]:begins[other] + len(mine)], mine) for other in others):
            return False
    order = np.argsort(keys, kind="stable")
    alike = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    seen = set()
    for found in order[np.union1d(alike, alike + 1)]:
        row = rows[found]
        own = prompt[row] // block_size * block_size
        name = keys[found], ids[begins[row]:begins[row] + (own + trace_block_size - 1) // trace_block_size].tobytes()
        if name in seen:
            return False
        seen.add(name)
    return True
