-- Orders and what was paid (in cents).
CREATE TABLE orders (
    id integer PRIMARY KEY,
    customer text NOT NULL,
    placed timestamp DEFAULT CURRENT_TIMESTAMP,
    CHECK (length(customer) > 0)
);

CREATE INDEX orders_by_customer
    ON orders (customer, placed);

INSERT INTO orders (id, customer)
VALUES
    (1, 'Ada'),
    (2, 'Brook (the second)');

SELECT o.customer, count(*) AS placed, sum(p.cents) AS paid
FROM orders AS o
LEFT JOIN payments AS p ON p.order_id = o.id
WHERE o.placed > '2024-01-01'
  AND p.cents BETWEEN 100 AND 10000
GROUP BY o.customer
HAVING sum(p.cents) > 0
ORDER BY paid DESC;

UPDATE orders
SET customer = trim(customer)
WHERE customer LIKE ' %';

WITH late AS (
    SELECT id
    FROM orders
    WHERE placed < '2023-01-01'
)
DELETE FROM payments
WHERE order_id IN (SELECT id FROM late);
