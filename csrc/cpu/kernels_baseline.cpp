#define FASTAGG_LEVEL baseline
#include "kernels-inl.h"
