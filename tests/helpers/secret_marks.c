/* Tells valgrind's memcheck which bytes are secret, by calling them undefined: it reports every branch and every address
   that depends on them. What it needs of Python is declared here, so that no header of Python has to be there. */

#include <stddef.h>
#include <valgrind/memcheck.h>

typedef struct object object;
extern object *PyObject_CallObject(object *, object *);

enum { INTEGER = 40 };  /* bytes of Python's object for an integer of 64 bits, or more */

void hide(void *memory, size_t size) {
    (void)VALGRIND_MAKE_MEM_UNDEFINED(memory, size);
}

void show(void *memory, size_t size) {
    (void)VALGRIND_MAKE_MEM_DEFINED(memory, size);
}

/* Return how many bytes are secret in part. */
size_t count_hidden(const unsigned char *memory, size_t size) {
    size_t count = 0;
    for (size_t index = 0; index < size; index++) {
        unsigned char bits = 0;
        (void)VALGRIND_GET_VBITS(memory + index, &bits, 1);
        count += bits != 0;
    }
    return count;
}

/* Write a line to the log. Reports that come after it belong to it. */
void note(const char *text) {
    VALGRIND_PRINTF("%s", text);
}

/* Call a function, and show the integer that it returns, whose address may depend on its value. */
object *call(object *function, object *arguments) {
    object *result = PyObject_CallObject(function, arguments);
    (void)VALGRIND_MAKE_MEM_DEFINED(&result, sizeof result);
    if (result)
        (void)VALGRIND_MAKE_MEM_DEFINED_IF_ADDRESSABLE(result, INTEGER);
    return result;
}
