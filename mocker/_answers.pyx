# cython: language_level=3
"""Answers that a trace gives: can anybody but their request find the blocks that they fill?

A block can be found by whoever has the same tokens up to its end. What a request generates first ends a block that
began in its prompt, or one of its answer alone; if nobody else can have that block, nobody can have any behind it.
Prompts are runs of ids, so few blocks qualify: those that are runs themselves, and those that two answers begin alike.
O(tokens of a block) a request.
"""
from libc.string cimport memcpy

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
    cdef int64_t n = prompt.shape[0], row, i, first, own, need, changes, found = 0
    cdef int64_t allowed = 0 if trace_block_size % block_size == 0 else (block_size - 1) // trace_block_size + 1
    cdef uint64_t mixed
    cdef uint32_t token
    rows, keys, runs = np.empty(n, np.int64), np.empty(n, np.uint64), np.empty(n, np.uint8)
    cdef int64_t[::1] at = rows
    cdef uint64_t[::1] key = keys
    cdef uint8_t[::1] run = runs
    cdef uint32_t[::1] block = np.zeros(block_size + 1, np.uint32)     # an even number are mixed
    with nogil:
        for row in range(n):
            own = prompt[row] % block_size
            need = block_size - own
            if answer_offsets[row + 1] - answer_offsets[row] < need:
                continue
            i = 0
            while i < own:
                first = prompt[row] - own + i  # up to where its id goes
                token = <uint32_t>hash_ids[hash_offsets[row] + first // trace_block_size]
                first = min(own, i + trace_block_size - first % trace_block_size)
                while i < first:
                    block[i] = token
                    i += 1
            memcpy(&block[own], &answers[answer_offsets[row]], need * sizeof(uint32_t))
            changes = 0
            for i in range(1, block_size):
                changes += block[i] != block[i - 1]
            mixed = <uint64_t>(prompt[row] // block_size + 1) * MIX
            for i in range(0, block_size, 2):
                mixed = (mixed ^ (<uint64_t>block[i + 1] << 32 | block[i])) * MIX
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
    ordered = np.sort(keys)
    if not np.any(np.diff(ordered) == 0):
        return True
    order = np.argsort(keys, kind="stable")
    alike = np.flatnonzero(np.diff(keys[order]) == 0)
    seen = set()
    for found in order[np.union1d(alike, alike + 1)]:
        row = rows[found]
        own = prompt[row] // block_size * block_size
        name = keys[found], ids[begins[row]:begins[row] + (own + trace_block_size - 1) // trace_block_size].tobytes()
        if name in seen:
            return False
        seen.add(name)
    return True
