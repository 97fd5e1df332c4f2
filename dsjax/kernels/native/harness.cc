// Calls the kernels as XLA does, without XLA or Python, for sanitizers: in a JAX process they would report faults of other libraries.
// Reads one call from standard input, makes it several times on each device of several concurrent programs, and writes each device's results
// without its working memory. The input:
//   dsjax_KERNEL PROGRAMS DEVICES TIMES, the number of arrays, TYPE (NumPy's letter) RANK LENGTHS of each, the same for results, of which the
//   last is working memory, NAME TYPE BYTES (as a number) of each setting, the end of the line, and the bytes of each device's arrays.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

// In one unit: without optimisation a compiler spends its time on the headers.
#include "attention.cc"
#include "bindings.cc"
#include "others.cc"
#include "products_float32.cc"
#include "products_fp4.cc"
#include "products_narrow.cc"

struct XLA_FFI_Error {
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  dsjax::Schedule schedule;
  int64_t run;
};

// The end of a call. The device goes on once the call is over and `next` is known.
struct XLA_FFI_Future {
  std::mutex mutex;
  std::function<void()> next;
  bool over = false;

  void after(bool ends, std::function<void()> then) {
    std::unique_lock<std::mutex> lock(mutex);
    if (ends) over = true;
    else next = std::move(then);
    if (!over || !next) return;
    then = std::move(next);
    lock.unlock();
    delete this;
    then();
  }
};

namespace {

using namespace dsjax;

[[noreturn]] void fail(XLA_FFI_Error* error) {
  std::fprintf(stderr, "%s\n", error->message.c_str());
  std::exit(4);
}

// The functions of XLA that kernels use. An error of a future ends the process.
XLA_FFI_Api stand_in() {
  XLA_FFI_Api api{};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* call) { return new XLA_FFI_Error{call->message}; };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* call) { delete call->error; };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* call) -> XLA_FFI_Error* {
    call->ctx->schedule([task = call->task, data = call->data] { task(data); });
    return nullptr;
  };
  api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* call) -> XLA_FFI_Error* { return call->run_id = call->ctx->run, nullptr; };
  api.XLA_FFI_Future_Create = [](XLA_FFI_Future_Create_Args* call) -> XLA_FFI_Error* { return call->future = new XLA_FFI_Future, nullptr; };
  api.XLA_FFI_Future_SetAvailable = [](XLA_FFI_Future_SetAvailable_Args* call) -> XLA_FFI_Error* { return call->future->after(true, {}), nullptr; };
  api.XLA_FFI_Future_SetError = [](XLA_FFI_Future_SetError_Args* call) -> XLA_FFI_Error* { fail(call->error); };
  return api;
}

// A thread for each task, begun at once: more disorder than a pool has.
struct Threads {
  std::mutex mutex;
  std::vector<std::thread> all;
  Schedule schedule() {
    return [this](std::function<void()> task) {
      std::lock_guard<std::mutex> lock(mutex);
      all.emplace_back(std::move(task));
    };
  }
  // Waits until no task runs, nor any that one has asked for.
  void join() {
    for (;;) {
      std::vector<std::thread> begun;
      {
        std::lock_guard<std::mutex> lock(mutex);
        begun.swap(all);
      }
      if (begun.empty()) return;
      for (std::thread& thread : begun) thread.join();
    }
  }
};

template <class T>
T read() {
  T value{};
  if (!(std::cin >> value)) std::exit(3);
  return value;
}

XLA_FFI_DataType read_type() {
  static const std::map<char, XLA_FFI_DataType> types{
      {'?', XLA_FFI_DataType_PRED}, {'i', XLA_FFI_DataType_S32}, {'l', XLA_FFI_DataType_S64}, {'B', XLA_FFI_DataType_U8}, {'H', XLA_FFI_DataType_U16},
      {'I', XLA_FFI_DataType_U32}, {'f', XLA_FFI_DataType_F32}, {'E', XLA_FFI_DataType_BF16}, {'4', XLA_FFI_DataType_F8E4M3FN}};
  return types.at(read<char>());
}

struct Shape {
  XLA_FFI_DataType type;
  std::vector<int64_t> lengths;

  static std::vector<Shape> read_all() {
    std::vector<Shape> shapes(read<size_t>());
    for (Shape& shape : shapes) {
      shape.type = read_type(), shape.lengths.resize(read<size_t>());
      for (int64_t& length : shape.lengths) length = read<int64_t>();
    }
    return shapes;
  }
};

struct Setting {
  std::string name = read<std::string>();
  XLA_FFI_DataType type = read_type();
  int64_t bytes = read<int64_t>();
  XLA_FFI_ByteSpan span{name.data(), name.size()};
  XLA_FFI_Scalar scalar{type, &bytes};
};

// Arrays in allocations of exactly their sizes, so that sanitizers find any access beyond.
struct Arrays {
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<std::vector<char>> bytes;
  std::vector<void*> pointers;

  explicit Arrays(std::vector<Shape>& shapes) : buffers(shapes.size()) {
    for (size_t i = 0; i < shapes.size(); i++) {
      auto& lengths = shapes[i].lengths;
      buffers[i] = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, shapes[i].type, nullptr, static_cast<int64_t>(lengths.size()), lengths.data()};
      buffers[i].data = bytes.emplace_back(dsjax::bytes(buffers[i])).data();
      pointers.push_back(&buffers[i]);
    }
  }
};

struct Device {
  Arrays arrays, results;
  std::vector<std::vector<char>> given = arrays.bytes;
  long left;
  XLA_FFI_ExecutionContext context;
  XLA_FFI_CallFrame frame{};

  // Makes the remaining calls. Each finds the arrays restored, at the same addresses, and the results filled with NaN.
  void go_on(XLA_FFI_Handler* handler) {
    if (left-- == 0) return;
    for (size_t i = 0; i < given.size(); i++) std::copy(given[i].begin(), given[i].end(), arrays.bytes[i].begin());
    for (auto& result : results.bytes) std::fill(result.begin(), result.end(), static_cast<char>(0xff));
    frame.future = nullptr;
    if (XLA_FFI_Error* error = handler(&frame)) fail(error);
    auto next = [this, handler] { go_on(handler); };
    if (frame.future) frame.future->after(false, next);
    else next();
  }
};

#define DSJAX_NAMED(name) {"dsjax_" #name, dsjax_##name}
const std::map<std::string, XLA_FFI_Handler*> handlers{
    DSJAX_NAMED(experts), DSJAX_NAMED(dense), DSJAX_NAMED(router), DSJAX_NAMED(absorbed_attention), DSJAX_NAMED(expanded_attention),
    DSJAX_NAMED(index_choice), DSJAX_NAMED(exchange), DSJAX_NAMED(experts_together)};

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  XLA_FFI_Handler* handler = handlers.at(read<std::string>());
  const long programs = read<long>(), ranks = read<long>(), times = read<long>();
  auto arrays = Shape::read_all(), results = Shape::read_all();
  std::list<Setting> settings;
  while (std::cin.get() != '\n') settings.emplace_back();
  std::vector<XLA_FFI_ArgType> argument_types(arrays.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);
  std::vector<XLA_FFI_AttrType> setting_types(settings.size(), XLA_FFI_AttrType_SCALAR);
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> values;
  for (Setting& setting : settings) names.push_back(&setting.span), values.push_back(&setting.scalar);
  const XLA_FFI_Api api = stand_in();
  Threads threads;
  std::list<Device> devices;
  for (long number = 0; number < programs * ranks; number++) {
    Device& device = devices.emplace_back(Device{Arrays(arrays), Arrays(results)});
    for (auto& bytes : device.given)
      if (!std::cin.read(bytes.data(), bytes.size())) std::exit(3);
    device.left = times, device.context = {threads.schedule(), number / ranks};
    device.frame = {XLA_FFI_CallFrame_STRUCT_SIZE, nullptr, &api, &device.context, XLA_FFI_ExecutionStage_EXECUTE};
    device.frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arrays.size()), argument_types.data(), device.arrays.pointers.data()};
    device.frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()), result_types.data(), device.results.pointers.data()};
    device.frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(settings.size()), setting_types.data(), names.data(), values.data()};
  }
  for (Device& device : devices) threads.schedule()([&device, handler] { device.go_on(handler); });
  threads.join();
  for (Device& device : devices)
    for (size_t i = 0; i + 1 < results.size(); i++) std::cout.write(device.results.bytes[i].data(), device.results.bytes[i].size());
  return 0;
}
