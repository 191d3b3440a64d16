PRAGMA application_id = 1634432366;
PRAGMA user_version = 4;
CREATE TABLE conversations (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    model TEXT NOT NULL,
    deleted REAL
, options TEXT);
CREATE TABLE messages (
    number INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL REFERENCES conversations (number) ON DELETE CASCADE,
    id TEXT NOT NULL,
    parent TEXT,
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    text TEXT NOT NULL,
    thinking TEXT NOT NULL,
    created REAL NOT NULL,
    model TEXT NOT NULL,
    stats TEXT,
    finish_reason TEXT,
    chosen INTEGER NOT NULL, rounds TEXT,
    UNIQUE (conversation, id)
);
CREATE INDEX conversations_by_time ON conversations (updated);
CREATE VIRTUAL TABLE message_index USING fts5 (words, tokenize = 'unicode61 remove_diacritics 2');
CREATE VIRTUAL TABLE title_index USING fts5 (words, tokenize = 'unicode61 remove_diacritics 2');
INSERT INTO conversations (number, id, title, created, updated, model, deleted, options) VALUES (1, 'queue', 'What is a queue?', 1795240000.0, 1795240240.0, 'starter', NULL, '{"temperature": 0.25, "max_tokens": 300, "top_p": 0.5, "seed": 7, "thinking": "low", "thinking_budget": 64}');
INSERT INTO conversations (number, id, title, created, updated, model, deleted, options) VALUES (2, 'lists', 'Lists', 1795241000.0, 1795241005.0, 'starter', NULL, NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen, rounds) VALUES (1, 1, 'queue-0', NULL, 'user', 'What is a queue?
Show me Python.', '', 1795240000.0, '', NULL, NULL, 1, NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen, rounds) VALUES (2, 1, 'queue-1', 'queue-0', 'assistant', 'First in, first *out*.', 'Easy.', 1795240000.0, 'starter', '{"prompt_tokens": 30, "cached_tokens": 4, "generated_tokens": 121, "target_passes": 52, "drafted": 160, "accepted": 67, "prefill_s": 0.25, "decode_s": 1.5, "known_tokens": 0, "not_cached": ""}', 'length', 7, NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen, rounds) VALUES (3, 1, 'queue-2', 'queue-0', 'assistant', 'A line of people.', '', 1795240060.0, 'starter', NULL, 'stop', 3, NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen, rounds) VALUES (4, 1, 'queue-3', 'queue-1', 'user', 'Thanks.', '', 1795240120.0, '', NULL, NULL, 4, NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen, rounds) VALUES (5, 1, 'queue-4', 'queue-1', 'user', 'Thank you!', '', 1795240180.0, '', NULL, NULL, 8, NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen, rounds) VALUES (6, 1, 'queue-5', 'queue-4', 'assistant', 'You are welcome.', '', 1795240240.0, 'starter', NULL, 'stop', 6, NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen, rounds) VALUES (7, 2, 'lists-0', NULL, 'user', '我想 reverse a list', '', 1795241000.0, '', NULL, NULL, 1, NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen, rounds) VALUES (8, 2, 'lists-1', 'lists-0', 'assistant', 'Use `xs[::-1]`.', '', 1795241005.0, 'starter', NULL, 'stop', 2, NULL);
INSERT INTO message_index (rowid, words) VALUES (1, 'What is a queue?
Show me Python.');
INSERT INTO message_index (rowid, words) VALUES (2, 'First in, first *out*.');
INSERT INTO message_index (rowid, words) VALUES (3, 'A line of people.');
INSERT INTO message_index (rowid, words) VALUES (4, 'Thanks.');
INSERT INTO message_index (rowid, words) VALUES (5, 'Thank you!');
INSERT INTO message_index (rowid, words) VALUES (6, 'You are welcome.');
INSERT INTO message_index (rowid, words) VALUES (7, ' 我  想  reverse a list');
INSERT INTO message_index (rowid, words) VALUES (8, 'Use `xs[::-1]`.');
INSERT INTO title_index (rowid, words) VALUES (1, 'What is a queue?');
INSERT INTO title_index (rowid, words) VALUES (2, 'Lists');
