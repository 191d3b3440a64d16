package example.store

import java.io.File

/** A value with the time (in ms) it was made at. */
data class Stamped<T>(val value: T, val at: Long)

sealed interface Change {
    data class Put(val key: String, val value: String) : Change
    data class Remove(val key: String) : Change
}

class Store(
    private val file: File,
    private val now: () -> Long = System::currentTimeMillis,
) : AutoCloseable {
    private val values = mutableMapOf<String, Stamped<String>>()

    fun apply(change: Change) {
        when (change) {
            is Change.Put -> values[change.key] = Stamped(change.value, now())
            is Change.Remove -> {
                values.remove(change.key)
            }
        }
    }

    fun newest(count: Int): List<String> =
        values.entries
            .sortedByDescending { it.value.at }
            .take(count)
            .map { (key, stamped) -> "$key (${stamped.value})" }

    override fun close() {
        try {
            file.writeText(values.keys.joinToString("\n"))
        } catch (e: java.io.IOException) {
            println("not kept :( ${e.message}")
        }
    }

    companion object {
        const val LIMIT = 100

        @JvmStatic
        fun open(path: String): Store {
            require(path.isNotEmpty()) { "no path" }
            return Store(File(path))
        }
    }
}
