/* CUDA without a GPU, for torch's CUDA build: what torch asks of the runtime and the driver before it computes anything.
 *
 * Preloaded into a process. The ids of the machine's GPUs are in FAKE_GPUS, separated by commas. CUDA_VISIBLE_DEVICES is
 * read when the first question is asked, as by NVIDIA's driver, and holds for the life of the process. A device's name is
 * its id.
 */

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#undef cudaGetDeviceProperties

enum { MOST = 64, LONGEST = 64 };

static char machine[MOST][LONGEST], shown[MOST][LONGEST];
static int machines, devices = -1, current;

static int cut(const char *text, char words[MOST][LONGEST])
{
    int count = 0;
    while (count < MOST) {
        text += strspn(text, " ");
        size_t length = strcspn(text, ",");
        size_t kept = length < LONGEST ? length : LONGEST - 1;
        memset(words[count], 0, LONGEST);
        memcpy(words[count], text, kept);
        while (kept && words[count][kept - 1] == ' ')
            words[count][--kept] = 0;
        count++;
        if (!text[length])
            break;
        text += length + 1;
    }
    return count;
}

/* The number of the GPU that a word names; -1 for none. */
static int named(const char *word)
{
    if (*word && strspn(word, "0123456789") == strlen(word))
        return atoi(word) < machines ? atoi(word) : -1;
    if (strncmp(word, "GPU-", 4) && strncmp(word, "MIG-", 4))
        return -1;
    int found = -1;
    for (int number = 0; number < machines; number++)
        if (!strncmp(machine[number], word, strlen(word))) {
            if (found >= 0)
                return -1;
            found = number;
        }
    return found;
}

static int ask(void)
{
    if (devices >= 0)
        return devices;
    const char *all = getenv("FAKE_GPUS"), *variable = getenv("CUDA_VISIBLE_DEVICES");
    static char words[MOST][LONGEST];
    machines = all && *all ? cut(all, machine) : 0;
    int count = variable ? cut(variable, words) : machines;
    devices = 0;
    for (int place = 0; place < count; place++) {
        int number = variable ? named(words[place]) : place;
        if (number < 0)
            break;
        for (int before = 0; before < devices; before++)
            if (!strcmp(shown[before], machine[number]))
                return devices = 0;
        strcpy(shown[devices++], machine[number]);
    }
    if (devices && !strncmp(shown[0], "MIG-", 4))
        devices = 1;
    return devices;
}

/* For the tests: the id of a device. */
const char *fake_device(int device) { return device < ask() ? shown[device] : ""; }

cudaError_t cudaGetDeviceCount(int *count) { return (*count = ask()) ? cudaSuccess : cudaErrorNoDevice; }

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= ask())
        return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current;
    return ask() ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    if (device < 0 || device >= ask())
        return cudaErrorInvalidDevice;
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, shown[device]);
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->totalGlobalMem = 80UL << 30;
    properties->warpSize = 32;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrComputeCapabilityMinor ? 0 : 1;
    return device < ask() ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDriverGetVersion(int *version) { return *version = 13020, cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 1, cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

int cuInit(unsigned flags) { return ask() ? 0 : 100; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = 0;
    return 0;
}

int cuGetErrorString(int error, const char **text) { return *text = "an error of CUDA's stand-in", 0; }
