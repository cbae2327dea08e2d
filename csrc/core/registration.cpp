// Registers each op in both libraries, as described in registration.h.

#include "core/registration.h"

#include <string>

namespace speedtorch {
namespace {

constexpr const char* kAll = "speedtorch";
constexpr const char* kLists = "speedtorch_lists";
constexpr const char* kKey = "CompositeExplicitAutograd";

}  // namespace

Ops::Ops(std::initializer_list<OpKernel> ops, std::source_location at)
    : schemas_(Library::Kind::FRAGMENT, kAll, nullptr, at.file_name(), at.line()),
      list_schemas_(Library::Kind::FRAGMENT, kLists, nullptr, at.file_name(), at.line()),
      kernels_(Library::Kind::IMPL, kAll, kKey, at.file_name(), at.line()),
      list_kernels_(Library::Kind::IMPL, kLists, kKey, at.file_name(), at.line()) {
  for (const OpKernel& op : ops) {
    const std::string schema = op.schema;
    const std::string name = schema.substr(0, schema.find('('));
    const bool takes_lists = schema.substr(0, schema.rfind(" -> ")).find("[]") != std::string::npos;
    schemas_.def(op.schema);
    kernels_.impl(name.c_str(), op.kernel);
    if (!takes_lists) continue;
    list_schemas_.def(op.schema);
    list_kernels_.impl(name.c_str(), op.kernel);
  }
}

}  // namespace speedtorch
