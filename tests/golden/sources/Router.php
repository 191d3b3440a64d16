<?php

declare(strict_types=1);

namespace Example\Http;

use Closure;
use InvalidArgumentException;

/**
 * Finds (the first) handler of a path.
 */
final class Router
{
    /** @var array<string, Closure> */
    private array $routes = [];

    private string $prefix;

    public function __construct(string $prefix = '')
    {
        $this->prefix = rtrim($prefix, '/');
    }

    public function add(string $path, Closure $handler): self
    {
        if (isset($this->routes[$path])) {
            throw new InvalidArgumentException("twice: {$path} :(");
        }
        $this->routes[$this->prefix . $path] = $handler;

        return $this;
    }

    public function dispatch(string $path, array $query = []): string
    {
        foreach ($this->routes as $pattern => $handler) {
            if (preg_match('#^' . $pattern . '$#', $path, $found) === 1) {
                return (string) $handler($found, $query);
            }
        }

        return match (true) {
            $path === '' => 'home',
            default => 'not found',
        };
    }

    /**
     * How many there are.
     */
    public function count(): int
    {
        return count(array_filter(
            array_keys($this->routes),
            static function (string $path): bool {
                return $path !== '';
            }
        ));
    }
}
