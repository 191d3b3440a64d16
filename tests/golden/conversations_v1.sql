PRAGMA application_id = 1634432366;
PRAGMA user_version = 1;
CREATE TABLE conversations (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    model TEXT NOT NULL,
    deleted REAL
);
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
    chosen INTEGER NOT NULL,
    UNIQUE (conversation, id)
);
CREATE INDEX conversations_by_time ON conversations (updated);
INSERT INTO conversations (number, id, title, created, updated, model, deleted) VALUES (1, 'queue', 'What is a queue?', 1795240000.0, 1795240240.0, 'starter', NULL);
INSERT INTO conversations (number, id, title, created, updated, model, deleted) VALUES (2, 'lists', 'Lists', 1795241000.0, 1795241005.0, 'starter', NULL);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen) VALUES (1, 1, 'queue-0', NULL, 'user', 'What is a queue?
Show me Python.', '', 1795240000.0, '', NULL, NULL, 1);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen) VALUES (2, 1, 'queue-1', 'queue-0', 'assistant', 'First in, first *out*.', 'Easy.', 1795240000.0, 'starter', '{"prompt_tokens": 30, "cached_tokens": 4, "generated_tokens": 121, "target_passes": 52, "drafted": 160, "accepted": 67, "prefill_s": 0.25, "decode_s": 1.5}', 'length', 7);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen) VALUES (3, 1, 'queue-2', 'queue-0', 'assistant', 'A line of people.', '', 1795240060.0, 'starter', NULL, 'stop', 3);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen) VALUES (4, 1, 'queue-3', 'queue-1', 'user', 'Thanks.', '', 1795240120.0, '', NULL, NULL, 4);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen) VALUES (5, 1, 'queue-4', 'queue-1', 'user', 'Thank you!', '', 1795240180.0, '', NULL, NULL, 8);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen) VALUES (6, 1, 'queue-5', 'queue-4', 'assistant', 'You are welcome.', '', 1795240240.0, 'starter', NULL, 'stop', 6);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen) VALUES (7, 2, 'lists-0', NULL, 'user', '我想 reverse a list', '', 1795241000.0, '', NULL, NULL, 1);
INSERT INTO messages (number, conversation, id, parent, role, text, thinking, created, model, stats, finish_reason, chosen) VALUES (8, 2, 'lists-1', 'lists-0', 'assistant', 'Use `xs[::-1]`.', '', 1795241005.0, 'starter', NULL, 'stop', 2);
