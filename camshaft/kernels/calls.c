/* Many kernel calls in one: what a captured step replays. Between them nothing runs but this loop, so what the next
 * call needs is not pushed out of the caches by an interpreter's own reads, nor waits for its lock. */

typedef struct {
    int (*run)(void *arguments);
    void *arguments;
} Call;

/* Makes the calls in order. Returns the number of those made when one failed, the failing one included; 0: all are. */
long camshaft_make_calls(const Call *calls, long count) {
    for (long i = 0; i < count; i++)
        if (calls[i].run(calls[i].arguments)) return i + 1;
    return 0;
}
