#define FASTAGG_LEVEL avx512
#include "kernels-inl.h"
