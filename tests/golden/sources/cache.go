// Package cache keeps (a few) values.
package cache

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrMissing says that there is none.
var ErrMissing = errors.New("cache: missing")

type entry struct {
	value   string
	expires time.Time
}

// Cache is safe for use from several goroutines.
type Cache struct {
	mu      sync.Mutex
	entries map[string]entry
	ttl     time.Duration
}

func New(ttl time.Duration) *Cache {
	return &Cache{
		entries: make(map[string]entry),
		ttl:     ttl,
	}
}

func (c *Cache) Get(key string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	found, ok := c.entries[key]
	if !ok || time.Now().After(found.expires) {
		return "", fmt.Errorf("%w: %q", ErrMissing, key)
	}
	return found.value, nil
}

func (c *Cache) Set(key, value string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.entries[key] = entry{value, time.Now().Add(c.ttl)}
}

func (c *Cache) Watch(done <-chan struct{}, removed func(key string)) {
	ticker := time.NewTicker(c.ttl)
	for {
		select {
		case <-done:
			ticker.Stop()
			return
		case now := <-ticker.C:
			for key, each := range c.entries {
				if now.After(each.expires) {
					delete(c.entries, key)
					removed(key)
				}
			}
		}
	}
}
