// Registration of the ops that take lists; see list_ops.h.

#include "call/list_ops.h"

#include <string>

namespace speedtorch {
namespace {

constexpr const char* kShared = "speedtorch";
constexpr const char* kLists = "speedtorch_lists";
constexpr const char* kKey = "CompositeExplicitAutograd";

}  // namespace

ListOps::ListOps(std::initializer_list<ListOp> ops, std::source_location at)
    : shared_schemas_(Library::Kind::FRAGMENT, kShared, nullptr, at.file_name(), at.line()),
      schemas_(Library::Kind::FRAGMENT, kLists, nullptr, at.file_name(), at.line()),
      shared_kernels_(Library::Kind::IMPL, kShared, kKey, at.file_name(), at.line()),
      kernels_(Library::Kind::IMPL, kLists, kKey, at.file_name(), at.line()) {
  for (const ListOp& op : ops) {
    const std::string schema = op.schema;
    const std::string name = schema.substr(0, schema.find('('));
    shared_schemas_.def(op.schema);
    schemas_.def(op.schema);
    shared_kernels_.impl(name.c_str(), op.kernel);
    kernels_.impl(name.c_str(), op.kernel);
  }
}

}  // namespace speedtorch
