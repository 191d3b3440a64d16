#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIZE(ring) ((ring)->end - (ring)->start)
#define CHECK(condition) do {            \
    if (!(condition)) abort();           \
} while (0)

/* A ring of numbers: 1) bounded, 2) never grows. */
struct ring {
    int *values;
    size_t capacity, start, end;
};

static struct ring *ring_new(size_t capacity)
{
    struct ring *ring = calloc(1, sizeof(*ring));
    CHECK(ring != NULL);
    ring->values = malloc(capacity * sizeof(int));
    ring->capacity = capacity;
    return ring;
}

static int ring_push(struct ring *ring, int value)
{
    if (SIZE(ring) == ring->capacity)
        return -1;
    ring->values[ring->end++ % ring->capacity] = value;
    return 0;
}

int ring_pop(struct ring *ring, int *value)
{
    if (SIZE(ring) == 0) {
        return -1;
    }
    *value = ring->values[ring->start++ % ring->capacity];
    return 0;
}

static const char *closing(char opening)
{
    switch (opening) {
    case '(':
        return ")";
    case '[':
        return "]";
    default:
        return "";
    }
}

int main(int argc, char **argv)
{
    struct ring *ring = ring_new(8);
    int value;

    for (int i = 1; i < argc; i++) {
        if (ring_push(ring, atoi(argv[i])) != 0) {
            fprintf(stderr, "full (%zu)\n", SIZE(ring));
            break;
        }
    }
    while (ring_pop(ring, &value) == 0)
        printf("%d%s\n", value, closing('('));
    free(ring->values);
    free(ring);
    return 0;
}
