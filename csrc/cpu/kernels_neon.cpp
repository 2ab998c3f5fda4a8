#define FASTAGG_LEVEL neon
#define FASTAGG_NEON
#include "kernels-inl.h"
